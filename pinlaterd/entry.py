"""The installed programs: Ctrl-C is handled before the libraries of a command are imported."""

from pinlaterd.interrupts import exit_on_interrupt


def pinlaterd() -> None:
    exit_on_interrupt("pinlaterd")
    from pinlaterd.main import cli

    cli(prog_name="pinlaterd")


def pinlater() -> None:
    exit_on_interrupt("pinlater")
    from pinlaterd.tool.main import cli

    cli(prog_name="pinlater")


def pinlater_admin() -> None:
    exit_on_interrupt("pinlater-admin")
    from pinlaterd.admin.main import cli

    cli(prog_name="pinlater-admin")
