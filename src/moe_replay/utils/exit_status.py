"""The exit status of every command."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """Why a command has ended.

    OK            it has done what was asked
    CHECK_FAILED  the answer is no: routes misaligned, a threshold exceeded, a layout that does not fit, divergence
    WRONG_INPUT   something must be corrected: an option, a recipe, a file, a row of the data
    FAILED        an engine, a reward, an environment, a library or the machine failed, or a package is missing
    INTERRUPTED   stopped by a signal with everything saved: start the same command again (EX_TEMPFAIL of sysexits.h)
    """

    OK = 0
    CHECK_FAILED = 1
    WRONG_INPUT = 2
    FAILED = 3
    INTERRUPTED = 75


EXIT_CODES = """\
exit status:
  0    done
  1    a check failed: routes misaligned, threshold exceeded, layout that does not fit, training diverged
  2    wrong option, recipe, file or row of the data
  3    an engine, a reward, an environment or the machine failed, or a package is missing
  75   interrupted and saved: start the same command again to resume
"""
