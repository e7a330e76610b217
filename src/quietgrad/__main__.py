"""``python -m quietgrad``, the command line."""

from quietgrad.cli import main

if __name__ == "__main__":
    main()
