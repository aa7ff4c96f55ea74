"""What every command does with a mistake: one message, exit code 2."""
import argparse
import difflib
import errno
import os
import re
import sys


class UserError(Exception):
    """Something the user can put right: what is wrong, where, and what to type next."""


def short(error):
    """A library's message in one line of at most 300 letters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def nearest(word, words):
    """The end of a message about a wrong name: "did you mean ...?", or all names if none is near."""
    near = difflib.get_close_matches(word, words, 3, 0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(words)}"


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are UserErrors, without the whole usage before them."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")     # -1e3 too

    def error(self, message):
        raise UserError(f"{message} (--help lists everything)")


def quiet_interrupt(kind, error, trace):
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = quiet_interrupt        # for Ctrl-C while the libraries load, before run_command() begins


def run_command(main):
    """Run main(). A UserError ends with exit code 2, Ctrl-C with 130."""
    try:
        main()
    except (UserError, PermissionError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:     # the reader went away: python data.py list | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)    # what is still to be printed may not fit either
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
