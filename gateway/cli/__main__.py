"""`python -m gateway.cli` is `facet`."""

from gateway.cli.main import run

if __name__ == "__main__":
    run()
