// An NBD client in Go with nothing but its standard library: many goroutines share one connection, and
// replies come in any order.
//
// Usage: client ADDRESS (HOST:PORT). Leaves in each block of 4096 bytes its number, again and again.
package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
)

const (
	haveOption   = 0x49484156454F5054
	requestMagic = 0x25609513
	replyMagic   = 0x67446698
	optGo        = 7
	repAck       = 1
	repInfo      = 3
	read         = 0
	write        = 1
	disconnect   = 2
	flush        = 3
	fua          = 1
	block        = 4096
	workers      = 16
)

var order = binary.BigEndian

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

type waiting struct {
	into []byte
	done chan uint32
}

type client struct {
	socket net.Conn
	mutex  sync.Mutex
	next   uint64
	asked  map[uint64]waiting
}

func (c *client) get(what interface{}) { must(binary.Read(c.socket, order, what)) }

func (c *client) put(what ...interface{}) {
	var message bytes.Buffer
	for _, part := range what {
		must(binary.Write(&message, order, part))
	}
	_, err := c.socket.Write(message.Bytes())
	must(err)
}

// The size of the default export.
func (c *client) negotiate() (size uint64) {
	var greeting struct {
		Magic [8]byte
		Have  uint64
		Flags uint16
	}
	c.get(&greeting)
	c.put(uint32(greeting.Flags&3), uint64(haveOption), uint32(optGo), uint32(6), uint32(0), uint16(0))
	for {
		var reply struct {
			Magic              uint64
			Option, Kind, Size uint32
		}
		c.get(&reply)
		data := make([]byte, reply.Size)
		_, err := io.ReadFull(c.socket, data)
		must(err)
		switch {
		case reply.Kind == repAck:
			return
		case reply.Kind == repInfo && order.Uint16(data) == 0:
			size = order.Uint64(data[2:])
		case reply.Kind != repInfo:
			must(fmt.Errorf("reply %#x to the choice of an export", reply.Kind))
		}
	}
}

// Delivers replies to the goroutines that wait for them.
func (c *client) listen() {
	for {
		var reply struct {
			Magic, Error uint32
			Cookie       uint64
		}
		if binary.Read(c.socket, order, &reply) != nil {
			return
		}
		c.mutex.Lock()
		asked, known := c.asked[reply.Cookie]
		delete(c.asked, reply.Cookie)
		c.mutex.Unlock()
		if reply.Magic != replyMagic || !known {
			must(fmt.Errorf("a reply that was not asked for: %+v", reply))
		}
		if reply.Error == 0 {
			_, err := io.ReadFull(c.socket, asked.into)
			must(err)
		}
		asked.done <- reply.Error
	}
}

func (c *client) ask(command, flags uint16, offset uint64, length int, data, into []byte) {
	done := make(chan uint32, 1)
	c.mutex.Lock()
	c.next++
	c.asked[c.next] = waiting{into, done}
	c.put(uint32(requestMagic), flags, command, c.next, offset, uint32(length), data)
	c.mutex.Unlock()
	if code := <-done; code != 0 {
		must(fmt.Errorf("command %d at %d: error %d", command, offset, code))
	}
}

func main() {
	socket, err := net.Dial("tcp", os.Args[1])
	must(err)
	c := &client{socket: socket, asked: map[uint64]waiting{}}
	blocks := c.negotiate() / block
	go c.listen()
	var all sync.WaitGroup
	for worker := uint64(0); worker < workers; worker++ {
		all.Add(1)
		go func(worker uint64) {
			defer all.Done()
			back := make([]byte, block)
			for number := worker; number < blocks; number += workers {
				data := bytes.Repeat(order.AppendUint64(nil, number), block/8)
				c.ask(write, uint16(number%2*fua), number*block, block, data, nil)
				c.ask(read, 0, number*block, block, nil, back)
				if !bytes.Equal(back, data) {
					must(fmt.Errorf("block %d is not as it was written", number))
				}
			}
		}(worker)
	}
	all.Wait()
	c.ask(flush, 0, 0, 0, nil, nil)
	c.put(uint32(requestMagic), uint16(0), uint16(disconnect), uint64(0), uint64(0), uint32(0))
}
