"""What users read: status and conditions."""
