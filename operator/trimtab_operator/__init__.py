"""The Trimtab operator: reconciles InferenceDeployments into engine pods and keeps them in trim."""
