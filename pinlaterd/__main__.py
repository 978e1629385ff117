"""`python -m pinlaterd`: the command line `pinlaterd`."""

from pinlaterd.main import cli

if __name__ == "__main__":
    cli(prog_name="pinlaterd")
