"""Send into a channel that the other side may be closing.

paramiko checks whether a channel is open, releases its lock, and sends. If the other side closes the channel in
between, paramiko's reading thread confirms that, and whatever is sent after the confirmation is for a channel that sshd
no longer has: sshd then ends the whole connection ("packet referred to nonexistent channel"), with every other channel
on it. Here the message is sent under the channel's lock, so that it either precedes the confirmation or is not sent.
`Packetizer`, `Message` and the locks are public in paramiko; its own method for sending holds no lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import paramiko
    from paramiko.message import Message

_MOST_BYTES = 64
"""Packet size besides the data, by paramiko's own estimate."""


def send(channel: paramiko.Channel, data: bytes, *, wait_s: float = 0.0) -> int:
    """Send the first part of `data`, as much as the other side accepts in one packet, and return its length.

    0 means that the other side accepts nothing now, even after `wait_s`.

    Raises:
        BrokenPipeError: the channel is closed, or its end was already sent.
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
    """Send the end of the data; return False if that is not possible now, because keys are being exchanged."""
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
    """Send a message as the transport would, but without blocking: the transport's thread may need the channel's lock.

    Return False if nothing can be sent because keys are being exchanged. Raises EOFError if the connection is lost.
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
