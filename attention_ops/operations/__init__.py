"""The operations of this package: one file each, named as the operation. The registry imports them when it is first asked."""
