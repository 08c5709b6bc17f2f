"""What everything else stands on: records, ports, errors, digests. Knows nothing of the rest."""
