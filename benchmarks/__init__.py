"""What is measured and compared for the documentation, and needs packages that a user does not."""
