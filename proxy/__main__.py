"""Entry point of `llama-proxy` and `python -m proxy`."""


def main() -> None:
    """Run the command line."""
    from proxy.cli.main import cli  # noqa: PLC0415 - keeps `import proxy.__main__` free of side effects

    cli(prog_name="llama-proxy")


if __name__ == "__main__":
    main()
