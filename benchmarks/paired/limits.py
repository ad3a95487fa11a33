import resource
import threading
import time

resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
files = []
try:
    while True:
        files.append(open("/dev/null"))
except OSError as error:
    print(error.strerror, len(files))
time.sleep(2.5)
for file in files:
    file.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
try:
    bytearray(3 << 30)
except MemoryError:
    print("MemoryError")
thread = threading.Thread(target=print, args=("thread",))
thread.start()
thread.join()
