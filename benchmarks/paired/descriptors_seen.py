import os
import resource

before = sorted(int(name) for name in os.listdir("/proc/self/fd"))
print(before, [os.readlink(f"/proc/self/fd/{number}") for number in before[:3]] != [])
with open("plain.txt", "w") as file:
    print("first descriptor", file.fileno())
print([number for number in before[:-1] if number > 2 and os.get_inheritable(number)])
print(
    resource.getrlimit(resource.RLIMIT_NOFILE),
    resource.getrlimit(resource.RLIMIT_CORE),
    resource.getrlimit(resource.RLIMIT_STACK),
)
