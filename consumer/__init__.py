"""Signals to students: streaming, objectives and training."""

if not __name__.startswith("logitstore."):
    # Under the short name every module would exist twice, with two copies of each class.
    raise ImportError(f"import logitstore.{__name__}, not {__name__}")
