//! The stack machine that reads a pickle: the opcodes that PyTorch writes, of protocols 2 to 5.
//!
//! A name that a pickle imports is looked up in [`Global::of`], and refused if it is not there. A
//! call (`REDUCE`, `NEWOBJ`, `BUILD`) is a step of this reader, never one of Python.

use std::collections::HashMap;

use super::globals::Global;
use super::pickle::{Node, Pickle, PickleError, StorageRef, TensorRef, Value, size};

/// Reads a pickle.
///
/// # Errors
///
/// [`PickleError::Global`] with the first imported name that weights do not need.
pub(super) fn read_pickle(bytes: &[u8]) -> Result<Pickle<'_>, PickleError> {
    let mut machine = Machine {
        rest: bytes,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
        pickle: Pickle { nodes: Vec::new(), root: Value::Other },
    };
    while !machine.step()? {}
    Ok(machine.pickle)
}

type Step<T> = Result<T, PickleError>;

/// Returns the error for bytes that are no pickle.
fn invalid<T>(reason: impl Into<String>) -> Step<T> {
    Err(PickleError::Invalid(reason.into()))
}

struct Machine<'a> {
    /// Bytes that have not been read.
    rest: &'a [u8],
    stack: Vec<Value<'a>>,
    /// Heights of the stack at the marks.
    marks: Vec<usize>,
    memo: HashMap<u32, Value<'a>>,
    pickle: Pickle<'a>,
}

impl<'a> Machine<'a> {
    /// Runs one opcode. Returns whether it was the last one.
    fn step(&mut self) -> Step<bool> {
        let opcode = self.take(1)?[0];
        match opcode {
            // PROTO and FRAME say nothing that is needed.
            0x80 => _ = self.take(1)?,
            0x95 => _ = self.take(8)?,
            b'.' => {
                self.pickle.root = self.pop()?;
                return Ok(true);
            }
            b'(' => self.marks.push(self.stack.len()),
            b'N' | 0x88 | 0x89 => self.stack.push(Value::Other),
            b'G' => {
                self.take(8)?;
                self.stack.push(Value::Other);
            }
            b'K' | b'M' | b'J' | 0x8a => self.push_int(opcode)?,
            b'X' | 0x8c | 0x8d | b'B' | b'C' | 0x8e => self.push_text(opcode)?,
            b')' | b't' | 0x85 | 0x86 | 0x87 => self.push_tuple(opcode)?,
            b']' => self.push(Node::List(Vec::new())),
            b'}' => self.push(Node::Dict(Vec::new())),
            b'a' => {
                let value = self.pop()?;
                self.append(vec![value])?;
            }
            b'e' => {
                let values = self.pop_mark()?;
                self.append(values)?;
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set_items(vec![key, value])?;
            }
            b'u' => {
                let values = self.pop_mark()?;
                self.set_items(values)?;
            }
            b'q' | b'r' | 0x94 | b'h' | b'j' => self.use_memo(opcode)?,
            b'c' | b'i' | 0x93 => self.import(opcode)?,
            b'Q' => self.persistent()?,
            b'R' | 0x81 => self.call(opcode == b'R')?,
            b'b' => self.build()?,
            _ => return invalid(format!("opcode {opcode:#04x} is none that PyTorch writes")),
        }
        Ok(false)
    }

    /// Takes `count` bytes.
    fn take(&mut self, count: usize) -> Step<&'a [u8]> {
        match self.rest.split_at_checked(count) {
            Some((taken, rest)) => {
                self.rest = rest;
                Ok(taken)
            }
            None => invalid("it ends within an opcode"),
        }
    }

    /// Takes a little-endian number of `count` bytes, at most 8.
    fn take_number(&mut self, count: usize) -> Step<u64> {
        let mut word = [0; 8];
        word[..count].copy_from_slice(self.take(count)?);
        Ok(u64::from_le_bytes(word))
    }

    /// Takes a line, without its end.
    fn take_line(&mut self) -> Step<&'a str> {
        let end = self.rest.iter().position(|&byte| byte == b'\n');
        let Some(end) = end else { return invalid("it ends within a name") };
        let line = &self.take(end + 1)?[..end];
        std::str::from_utf8(line).or_else(|_| invalid("a name is not UTF-8"))
    }

    fn push(&mut self, node: Node<'a>) {
        self.stack.push(Value::Node(self.pickle.nodes.len()));
        self.pickle.nodes.push(node);
    }

    fn pop(&mut self) -> Step<Value<'a>> {
        // Values below the last mark belong to the enclosing container.
        if self.marks.last().is_some_and(|&mark| self.stack.len() <= mark) {
            return invalid("the stack is empty above its last mark");
        }
        self.stack.pop().map_or_else(|| invalid("the stack is empty"), Ok)
    }

    /// Takes the values above the last mark, and the mark.
    fn pop_mark(&mut self) -> Step<Vec<Value<'a>>> {
        match self.marks.pop() {
            Some(mark) => Ok(self.stack.split_off(mark.min(self.stack.len()))),
            None => invalid("there is no mark"),
        }
    }

    fn push_int(&mut self, opcode: u8) -> Step<()> {
        let number = match opcode {
            b'K' => self.take_number(1)? as i64,
            b'M' => self.take_number(2)? as i64,
            b'J' => i64::from(self.take_number(4)? as u32 as i32),
            _ => {
                let count = self.take_number(1)? as usize;
                if count > size_of::<i64>() {
                    return invalid(format!("an integer of {count} bytes"));
                }
                let number = self.take_number(count)? as i64;
                // The sign is that of the last byte.
                let unused = 64 - 8 * count as u32;
                if count == 0 { 0 } else { number << unused >> unused }
            }
        };
        self.stack.push(Value::Int(number));
        Ok(())
    }

    fn push_text(&mut self, opcode: u8) -> Step<()> {
        let length = match opcode {
            0x8c | b'C' => self.take_number(1)?,
            b'X' | b'B' => self.take_number(4)?,
            _ => self.take_number(8)?,
        };
        let bytes = self.take(usize::try_from(length).unwrap_or(usize::MAX))?;
        let value = match opcode {
            b'X' | 0x8c | 0x8d => match std::str::from_utf8(bytes) {
                Ok(text) => Value::Text(text),
                Err(_) => return invalid("a text is not UTF-8"),
            },
            _ => Value::Other,
        };
        self.stack.push(value);
        Ok(())
    }

    fn push_tuple(&mut self, opcode: u8) -> Step<()> {
        let values = match opcode {
            b')' => Vec::new(),
            b't' => self.pop_mark()?,
            _ => {
                let mut values = Vec::with_capacity(3);
                for _ in 0..=opcode - 0x85 {
                    values.push(self.pop()?);
                }
                values.reverse();
                values
            }
        };
        self.push(Node::Tuple(values));
        Ok(())
    }

    /// Returns the node on top of the stack, which stays there.
    fn top(&mut self) -> Step<&mut Node<'a>> {
        match self.stack.last() {
            Some(&Value::Node(index)) => Ok(&mut self.pickle.nodes[index]),
            _ => invalid("a container is expected, and there is none"),
        }
    }

    fn append(&mut self, values: Vec<Value<'a>>) -> Step<()> {
        match self.top()? {
            Node::List(list) => {
                list.extend(values);
                Ok(())
            }
            _ => invalid("values are appended to what is no list"),
        }
    }

    fn set_items(&mut self, values: Vec<Value<'a>>) -> Step<()> {
        match self.top()? {
            Node::Dict(entries) if values.len().is_multiple_of(2) => {
                entries.extend(values.chunks_exact(2).map(|pair| (pair[0], pair[1])));
                Ok(())
            }
            _ => invalid("items are set in what is no dict"),
        }
    }

    fn use_memo(&mut self, opcode: u8) -> Step<()> {
        let index = match opcode {
            0x94 => self.memo.len() as u64,
            b'q' | b'h' => self.take_number(1)?,
            _ => self.take_number(4)?,
        };
        let index = index as u32;
        if matches!(opcode, b'h' | b'j') {
            let Some(value) = self.memo.get(&index) else {
                return invalid(format!("there is no memo {index}"));
            };
            self.stack.push(*value);
        } else {
            let Some(value) = self.stack.last() else { return invalid("the stack is empty") };
            self.memo.insert(index, *value);
        }
        Ok(())
    }

    /// Reads the name of an import, and refuses it if weights do not need it.
    fn import(&mut self, opcode: u8) -> Step<()> {
        let (module, name) = match opcode {
            0x93 => match (self.pop()?, self.pop()?) {
                (Value::Text(name), Value::Text(module)) => (module, name),
                _ => return invalid("the name of an import is no text"),
            },
            _ => (self.take_line()?, self.take_line()?),
        };
        match Global::of(module, name) {
            // `i` imports and calls at once, which PyTorch does not write.
            Some(global) if opcode != b'i' => {
                self.stack.push(Value::Global(global));
                Ok(())
            }
            _ => Err(PickleError::Global(format!("{module}.{name}"))),
        }
    }

    /// Reads a reference to a storage: `("storage", class, key, location, number of elements)`.
    fn persistent(&mut self) -> Step<()> {
        let id = self.pop()?;
        match self.pickle.sequence(id) {
            Some(
                &[
                    Value::Text("storage"),
                    Value::Global(Global::Storage(dtype)),
                    Value::Text(key),
                    ..,
                ],
            ) => {
                self.push(Node::Storage(StorageRef { dtype, key }));
                Ok(())
            }
            _ => invalid("a persistent id is no storage"),
        }
    }

    /// Stands for the call of an imported name: `REDUCE` calls it, `NEWOBJ` makes an instance.
    fn call(&mut self, reduce: bool) -> Step<()> {
        let (arguments, callee) = (self.pop()?, self.pop()?);
        let Some(arguments) = self.pickle.sequence(arguments) else {
            return invalid("the arguments of a call are no tuple");
        };
        let first = arguments.first().copied();
        match (callee, first, reduce) {
            (Value::Global(Global::OrderedDict), None, true) => self.push(Node::Dict(Vec::new())),
            (Value::Global(Global::Size), Some(sizes), true) => self.stack.push(sizes),
            (Value::Global(Global::RebuildParameter), Some(tensor), true) => {
                self.stack.push(tensor)
            }
            (Value::Global(Global::Unused), _, _) => self.stack.push(Value::Other),
            (Value::Global(Global::RebuildTensor), _, true) => {
                let tensor = self.tensor(arguments)?;
                self.push(Node::Tensor(tensor));
            }
            (Value::Global(Global::Class(class)), None, _) => self.push(Node::Object(class, None)),
            _ => return invalid("a call has other arguments than PyTorch writes"),
        }
        Ok(())
    }

    /// Returns the tensor of `_rebuild_tensor_v2(storage, offset, size, stride, ..)`.
    fn tensor(&self, arguments: &[Value<'a>]) -> Step<TensorRef<'a>> {
        let tensor = || match *arguments {
            [storage, offset, shape, strides, ..] => {
                let Node::Storage(storage) = *self.pickle.node(storage)? else { return None };
                let (shape, strides) = (self.pickle.sizes(shape)?, self.pickle.sizes(strides)?);
                Some(TensorRef { storage, offset: size(offset)?, shape, strides })
            }
            _ => None,
        };
        tensor().map_or_else(|| invalid("the arguments of a tensor are others than PyTorch's"), Ok)
    }

    /// Sets the state of an object. Attributes of a dict are dropped: `state_dict` of PyTorch has
    /// its versions there.
    fn build(&mut self) -> Step<()> {
        let state = self.pop()?;
        match self.stack.last() {
            Some(Value::Node(index)) => match &mut self.pickle.nodes[*index] {
                Node::Object(_, held) => *held = Some(state),
                Node::Dict(_) => {}
                _ => return invalid("a state is set of what has none"),
            },
            Some(Value::Other) => {}
            _ => return invalid("a state is set of what has none"),
        }
        Ok(())
    }
}
