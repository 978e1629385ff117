"""`python -m pinlaterd`: the command line `pinlaterd`."""

from pinlaterd.cli import run_pinlaterd

if __name__ == "__main__":
    run_pinlaterd()
