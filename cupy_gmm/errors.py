"""What this library raises, and nothing else it raises on purpose.

    GmmError
    ├── ArgumentError     (ValueError)            shape, stride, device, value of an argument
    ├── DtypeError        (TypeError)             element type of an argument
    ├── UnsupportedError  (NotImplementedError)   asked for correctly, and not offered here
    └── CompileError      (RuntimeError)          NVRTC, driver or cache could not give a kernel

Every message is a sentence that names the argument, what it is, what it must be and how to fix it.
"""


class GmmError(Exception):
    """Base of every exception of this library."""


class ArgumentError(GmmError, ValueError):
    """An argument has a shape, stride, device or value that the call cannot take."""


class DtypeError(GmmError, TypeError):
    """An argument has an element type that the call cannot take."""


class UnsupportedError(GmmError, NotImplementedError):
    """The request is well formed, but not offered on this device or by this version."""


class CompileError(GmmError, RuntimeError):
    """A kernel could not be compiled or loaded; the message carries the compiler's log."""
