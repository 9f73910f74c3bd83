"""What people read: in the terminal, as HTML and as Markdown."""
