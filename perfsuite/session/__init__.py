"""A session: measures one case after another, and keeps what it found. Begin with `session.session`."""
