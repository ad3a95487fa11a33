"""A daemon's manners: every descriptor but the three is closed, then work goes on."""

import os
import sys
import time

os.closerange(3, 4096)
with open("a.txt", "w") as file:
    print(file.fileno(), file=file)
    numbers = [os.dup(0) for _ in range(8)]
    print(numbers)
    time.sleep(2.5)
    for number in numbers:
        os.fstat(number)
print(open("a.txt").read(), file=sys.stdout)
