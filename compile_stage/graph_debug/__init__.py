"""Why a candidate's outputs are wrong, or its compilation fails: traces, smallest sets, small graphs, bundles."""
