import sys

print("modules before:", sorted(name for name in sys.modules if not name.startswith(("dsdoctor", "__main__"))))
