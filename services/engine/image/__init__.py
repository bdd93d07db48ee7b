"""Images: what a virtual machine boots, built from Debian packages or pulled by digest."""
