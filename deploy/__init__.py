"""The `headwater` command: starts, watches and examines runs. Sits on top of every other
package."""
