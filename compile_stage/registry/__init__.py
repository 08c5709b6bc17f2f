"""Where models live: MLflow, or a plain folder."""
