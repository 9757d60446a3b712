"""A command group whose default command takes the model: `onboard org/name` beside `onboard
status`.

Click groups have none; here an invocation that does not begin with the name of a command is one of
the default. A model whose id is also a command's name is reached with the default command's own
name: `onboard model status`.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from onboard.errors import UsageError

DEFAULT = "model"
HELP = "help"


class DefaultCommandGroup(TyperGroup):
    """A group that hands everything but its own options and commands to the command `model`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command's name in front of arguments that begin with no command and no
        group option.

        `help COMMAND` is `COMMAND --help`. Raises `UsageError` for a word that is nearly a command.
        """
        own = {option for parameter in super().get_params(ctx) for option in parameter.opts}
        if args[:1] == [HELP]:
            args = [*self._known(args[1:]), "--help"]
        elif args and args[0] not in self.commands and args[0] not in own:
            self._refuse_near_command(args[0])
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args or ["--help"])

    def _known(self, words: list[str]) -> list[str]:
        """Return the words after `help`; raise `UsageError` when the first is no command."""
        if words and words[0] not in self.commands:
            commands = ", ".join(sorted(self.commands))
            raise UsageError(f"there is no command {words[0]!r}", hint=f"Commands: {commands}")
        return words

    def _refuse_near_command(self, word: str) -> None:
        """Raise `UsageError` for a mistyped command; ids with an owner and folders are models."""
        near = difflib.get_close_matches(word, self.commands, n=1, cutoff=0.75)
        if near and not Path(word).expanduser().exists():
            hint = f"Did you mean {near[0]!r}? A model of that name: onboard {DEFAULT} {word}"
            raise UsageError(f"there is no command {word!r}", hint=hint)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the commands and, since no command is the default's, the options of that."""
        found: list[Any] = super().shell_complete(ctx, incomplete)
        default: Any = self.commands[DEFAULT]
        known = {item.value for item in found}
        return [
            *found,
            *(item for item in default.shell_complete(ctx, incomplete) if item.value not in known),
        ]

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
