"""The InferenceDeployment as typed values: its specification, schema, names, quantities and times."""
