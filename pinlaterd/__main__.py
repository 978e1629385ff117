"""`python -m pinlaterd`: the command line `pinlaterd`."""

from pinlaterd.cli.entry import pinlaterd

if __name__ == "__main__":
    pinlaterd()
