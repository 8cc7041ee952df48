"""`python -m demix`, which is the command `demix`."""

from demix.commands.main import main

if __name__ == "__main__":
    main()
