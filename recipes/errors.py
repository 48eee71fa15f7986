"""The one exception that means: the user can mend this."""


class UserError(Exception):
    """Bad input from the user; the message names file, row, key or value, and the mend.

    Scripts print it as `error: ...` on stderr and exit with status 2, without a traceback.
    """
