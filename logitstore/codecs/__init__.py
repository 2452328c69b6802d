"""Zarr v3 codecs of the store, registered through the ``zarr.codecs`` entry point."""
