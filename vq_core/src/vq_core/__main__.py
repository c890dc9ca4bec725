"""`python -m vq_core` is `vq`."""

from vq_core.cli.main import main

if __name__ == "__main__":
    main()
