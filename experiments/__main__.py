import sys

NEEDED = ("click", "rich", "matplotlib")


def run():
    """The command line; one line and exit status 2 where a package that it needs is missing."""
    try:
        from experiments.cli import main

        main()
    except ModuleNotFoundError as error:
        package = error.name.partition(".")[0]
        if package not in NEEDED:
            raise
        print(f"error: needs {package}: pip install '.[plot]'", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run()
