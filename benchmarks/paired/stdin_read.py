import sys

print(sys.stdin.isatty() if sys.stdin else None)
for line in sys.stdin or ():
    print(line.strip().upper())
print(repr(input("? ")) if "--ask" in sys.argv else "")
