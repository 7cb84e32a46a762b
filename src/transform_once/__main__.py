"""`python -m transform_once` is the command `t1`."""

from transform_once.cli import main

if __name__ == "__main__":
    main()
