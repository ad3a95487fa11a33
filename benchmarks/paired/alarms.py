import asyncio
import signal
import time

ticks = []
signal.signal(signal.SIGALRM, lambda number, frame: ticks.append(frame.f_code.co_name))
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)


def work():
    end = time.monotonic() + 0.4
    while time.monotonic() < end:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)


work()
print(len(ticks) >= 2, set(ticks))


async def main():
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, print, "usr1 in the loop")
    signal.raise_signal(signal.SIGUSR1)
    await asyncio.sleep(0.1)
    process = await asyncio.create_subprocess_exec("true")
    print(await process.wait(), len(asyncio.all_tasks()))


asyncio.run(main())
