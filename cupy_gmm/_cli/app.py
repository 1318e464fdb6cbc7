"""The list of commands. Called by `main` once the libraries of the command line are known to be there."""

from typing import Annotated

import typer

from .._version import __version__
from . import compile, counts, demo, doctor


def build() -> typer.Typer:
    """The application, with every command registered."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    app.command("demo")(demo.demo)
    app.command("counts")(counts.counts)
    app.command("doctor")(doctor.doctor)
    app.command("compile")(compile.compile_kernels)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Grouped GEMM for mixture-of-experts: one launch for all experts, uneven counts at their real cost.

    Start with **doctor** (is this machine ready?), then **demo** (one expert layer, forward and backward,
    checked number by number), then **counts** on the histograms you recorded. **compile** warms the kernel
    cache ahead of time.
    """
