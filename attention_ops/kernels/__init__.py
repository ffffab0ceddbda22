"""Arrays in, arrays out: nothing here knows of registries, metadata, devices or plans."""
