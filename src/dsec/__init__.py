"""DSec: sandboxes for training and evaluating language-model agents."""
