"""Why a candidate's answers, or its compilation, went wrong: traces, smallest sets, small graphs, bundles."""
