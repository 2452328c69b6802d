"""Signals to students: streaming, objectives and training."""

if not __name__.startswith("logitstore."):
    raise ImportError(
        f"import logitstore.{__name__}, not {__name__}: the short name would be a second copy of the module"
    )
