"""From encoded tensors to gRPC messages and back."""
