"""Framework → ONNX, and the original model as the FP32 baseline: one file per MLflow flavor."""
