"""What the lab's models learn: real data that comes with Python or scikit-learn, and two synthetic tasks."""
