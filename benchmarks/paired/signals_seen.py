import os
import signal

for each in sorted(signal.valid_signals()):
    print(int(each), signal.getsignal(each))
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getitimer(signal.ITIMER_REAL), signal.set_wakeup_fd(-1))
with open("/proc/self/status") as status:
    print([line.strip() for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt", "SigPnd"))])
print(os.getppid() > 0)
