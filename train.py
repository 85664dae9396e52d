import sys

from vime.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
