"""Models: found, read, quantized on arrival, prepared for training, and given adapters."""
