"""A command group whose default command takes the model: `onboard org/name` beside `onboard status`.

Click groups have none; here an invocation that does not begin with the name of a command is one of the default.
A model whose id is also a command's name is reached with the default command's own name: `onboard model status`.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

DEFAULT = "model"


class DefaultCommandGroup(TyperGroup):
    """A group that hands everything but its own options and commands to the command `model`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command's name in front of arguments that begin with no command and no group option."""
        own = {option for parameter in super().get_params(ctx) for option in parameter.opts}
        if args and args[0] not in self.commands and args[0] not in own:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args or ["--help"])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the default command's arguments and options as the group's own."""
        default: Any = self.commands[DEFAULT]
        shown = TyperGroup(
            name=self.name,
            help=default.help,
            params=[*default.params, *self.params],
            commands={name: command for name, command in self.commands.items() if name != DEFAULT},
            subcommand_metavar="| COMMAND [ARGS]...",
            rich_markup_mode=self.rich_markup_mode,
            epilog=self.epilog,
        )
        shown.format_help(ctx, formatter)
