"""Sending into a channel that the other side may be closing.

paramiko looks whether a channel is open, lets go of its lock, and sends. If the other side closes it in between,
paramiko's reading thread confirms that, and what is sent after the confirmation is for a channel that sshd no longer
has: it ends the whole connection ("packet referred to nonexistent channel"), with every other channel on it. Here the
message goes out under the channel's lock, so that it is ahead of the confirmation or is not sent. `Packetizer`,
`Message` and the locks are public in paramiko; its own way to send holds no lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import paramiko
    from paramiko.message import Message

_MOST_BYTES = 64
"""What a packet needs besides its data, by paramiko's own reckoning."""


def send(channel: paramiko.Channel, data: bytes, *, wait_s: float = 0.0) -> int:
    """Send the first part of `data`, as much as the other side takes in one packet; its length.

    0 means that it takes nothing now, also after `wait_s`.

    Raises:
        BrokenPipeError: the channel is closed, or was told that nothing more comes.
        EOFError: the connection is lost.
    """
    from paramiko.common import cMSG_CHANNEL_DATA

    with channel.lock:
        if not channel.closed and channel.out_window_size == 0 and wait_s > 0:
            channel.out_buffer_cv.wait(wait_s)
        if channel.closed or channel.eof_sent:
            raise BrokenPipeError
        size = min(len(data), channel.out_window_size, channel.out_max_packet_size - _MOST_BYTES)
        if size <= 0:
            return 0
        message = _message(cMSG_CHANNEL_DATA, channel)
        message.add_string(data[:size])
        if not pass_on(channel.transport, message):
            return 0
        channel.out_window_size -= size
        return size


def end(channel: paramiko.Channel) -> bool:
    """Say that nothing more comes. False if that cannot be said now, because keys are exchanged."""
    from paramiko.common import cMSG_CHANNEL_EOF

    with channel.lock:
        if not channel.closed and not channel.eof_sent:
            if not pass_on(channel.transport, _message(cMSG_CHANNEL_EOF, channel)):
                return False
            channel.eof_sent = True
        return True


def _message(kind: bytes, channel: paramiko.Channel) -> Message:
    from paramiko.message import Message

    message = Message()
    message.add_byte(kind)
    message.add_int(channel.remote_chanid)
    return message


def pass_on(transport: paramiko.Transport | None, message: Message) -> bool:
    """What the transport does with a user's message, but for waiting: that thread may need the channel's lock.

    False where nothing can be sent, because keys are exchanged. Raises EOFError where the connection is lost.
    """
    if transport is None or not transport.is_active():
        raise EOFError
    if not transport.clear_to_send.is_set():
        return False
    with transport.clear_to_send_lock:
        if not transport.clear_to_send.is_set():
            return False
        transport.packetizer.send_message(message)
    return True
