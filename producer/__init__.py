"""Teachers to signals: everything that runs a teacher model."""

if not __name__.startswith("logitstore."):
    # Under the short name every module would exist twice, with two copies of each class.
    raise ImportError(f"import logitstore.{__name__}, not {__name__}")
