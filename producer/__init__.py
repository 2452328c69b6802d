"""Teachers to signals: everything that runs a teacher model."""

if not __name__.startswith("logitstore."):
    raise ImportError(
        f"import logitstore.{__name__}, not {__name__}: the short name would be a second copy of the module"
    )
