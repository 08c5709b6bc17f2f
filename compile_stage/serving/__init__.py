"""What a published model carries to load and answer anywhere; vendored into every bundle."""
