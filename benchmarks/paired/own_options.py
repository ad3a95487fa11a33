import argparse
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--overflow", default="mine")
parser.add_argument("--hang", type=int)
parser.add_argument("--hang-after", type=float)
parser.add_argument("--report")
parser.add_argument("--memory", action="store_true")
parser.add_argument("--local_rank", "--local-rank", type=int, default=-1)
parser.add_argument("rest", nargs="*")
print(parser.parse_args(), sys.argv, parser.prog)
