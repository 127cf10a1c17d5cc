//! `nowait top`: what a running server does, on a screen that is drawn again each second.
//!
//! Invariant: the terminal is as it was when this ends, by a key, by a signal or by an error; a text
//! of a client reaches it without control characters.

use std::io::{self, IsTerminal, Stdout, Write, stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossterm::event::{self, Event, KeyCode, KeyModifiers};
use crossterm::terminal::{self, ClearType, EnterAlternateScreen, LeaveAlternateScreen};
use crossterm::{cursor, execute, queue, style};
use nowait_control::{Client, ClientError, ConnectionInfo, ExportInfo, Load, ServerInfo, paths};
use nowait_daemon::error::{CliError, os_message};
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGTERM};

use crate::args::control_args::ServerArgs;
use crate::args::top_args::TopArgs;
use crate::commands::top_layout::{HELP, KEYS, MAX_WIDTH, View, cut};
use crate::control_client::failed;
use crate::control_client::the_client;
use crate::output;

/// The time between two questions.
const PERIOD: Duration = Duration::from_secs(1);
/// How soon a signal is noticed.
const SIGNAL_CHECK: Duration = Duration::from_millis(200);

/// A server at one moment.
struct Moment {
    at: Instant,
    server: ServerInfo,
    exports: Vec<ExportInfo>,
    connections: Vec<ConnectionInfo>,
}

/// Shows the server of `args` until told to end, or once.
///
/// # Errors
/// There is no server, it answers no more, or the terminal cannot be set up.
pub(crate) fn run(args: &TopArgs) -> Result<(), CliError> {
    let client = the_client(&args.server)?;
    let before = ask(&client).map_err(|error| failed(client.place(), &error))?;
    if args.once || args.server.json || !stdout().is_terminal() {
        std::thread::sleep(PERIOD);
        let now = ask(&client).map_err(|error| failed(client.place(), &error))?;
        return match args.server.json {
            true => output::print(json_of(&before, &now)),
            false => output::print(page(&before, &now, MAX_WIDTH).join("\n") + "\n"),
        };
    }
    let no_screen =
        |error: io::Error| CliError::new(format!("the terminal: {}", os_message(&error)));
    let mut screen = Screen::enter().map_err(no_screen)?;
    let shown = show(&mut screen, &args.server, client, before);
    drop(screen);
    shown
}

/// Draws each second until told to end.
fn show(
    screen: &mut Screen,
    args: &ServerArgs,
    mut client: Client,
    mut before: Moment,
) -> Result<(), CliError> {
    let no_screen =
        |error: io::Error| CliError::new(format!("the terminal: {}", os_message(&error)));
    let mut last: Option<Moment> = None;
    loop {
        let lines = |width| match &last {
            Some(last) => page(last, &before, width),
            None => vec!["nowait: the first second".to_owned()],
        };
        screen.draw(&lines).map_err(no_screen)?;
        if screen.is_to_end(&lines).map_err(no_screen)? {
            return Ok(());
        }
        let now = match ask(&client) {
            Ok(now) => now,
            // After an upgrade another process answers, perhaps at another socket.
            Err(_) => {
                client = the_client(args)?;
                ask(&client).map_err(|error| failed(client.place(), &error))?
            }
        };
        last = Some(std::mem::replace(&mut before, now));
    }
}

fn ask(client: &Client) -> Result<Moment, ClientError> {
    let (server, exports) = (client.server()?, client.exports()?);
    Ok(Moment { at: Instant::now(), server, exports, connections: client.connections()? })
}

/// Work of each export between two moments.
fn loads(before: &Moment, now: &Moment) -> Vec<Load> {
    let seconds = (now.at - before.at).as_secs_f64().max(1e-3);
    let old = |id| before.exports.iter().find(|export| export.id == id);
    now.exports.iter().map(|export| Load::between(old(export.id), export, seconds)).collect()
}

fn json_of(before: &Moment, now: &Moment) -> String {
    let value = json!({
        "server": now.server,
        "exports": loads(before, now),
        "connections": now.connections,
    });
    format!("{value}\n")
}

/// The lines of the screen, as wide as it is.
fn page(before: &Moment, now: &Moment, width: usize) -> Vec<String> {
    let view = View {
        server: &now.server,
        exports: &now.exports,
        loads: &loads(before, now),
        paths: &paths(&before.exports, &now.exports),
        connections: &now.connections,
    };
    view.lines(width)
}

/// The terminal, in a state that the user does not keep.
struct Screen {
    out: Stdout,
    /// A signal has asked for the end.
    told: Arc<AtomicBool>,
    /// Whether the help is shown in place of the server.
    helps: bool,
}

/// Makes the lines of a screen of a width.
type Lines<'a> = &'a dyn Fn(usize) -> Vec<String>;

impl Screen {
    fn enter() -> io::Result<Self> {
        let told = Arc::new(AtomicBool::new(false));
        for signal in [SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, told.clone())?;
        }
        terminal::enable_raw_mode()?;
        let mut screen = Self { out: stdout(), told, helps: false };
        execute!(screen.out, EnterAlternateScreen, cursor::Hide)?;
        Ok(screen)
    }

    /// Draws as many of `lines`, or of the help, as there is place for, and the keys below them.
    fn draw(&mut self, lines: Lines) -> io::Result<()> {
        let (width, height) = terminal::size()?;
        let (width, rows) = (usize::from(width), usize::from(height.saturating_sub(1)));
        let mut lines = match self.helps {
            true => HELP.map(str::to_owned).to_vec(),
            false => lines(width),
        };
        lines.resize(rows, String::new());
        lines.push(KEYS.to_owned());
        for (at, line) in (0..height).zip(&lines) {
            let rest = terminal::Clear(ClearType::UntilNewLine);
            queue!(self.out, cursor::MoveTo(0, at), style::Print(cut(line, width)), rest)?;
        }
        self.out.flush()
    }

    /// Waits a period, and draws `lines` again where the size changes or the help comes or goes. Whether the user or a signal
    /// wants the end.
    fn is_to_end(&mut self, lines: Lines) -> io::Result<bool> {
        let until = Instant::now() + PERIOD;
        while !self.told.load(Ordering::Relaxed) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            if !event::poll(left.min(SIGNAL_CHECK))? {
                continue;
            }
            match event::read()? {
                Event::Key(key) => match key.code {
                    KeyCode::Char('?') => self.help(!self.helps, lines)?,
                    KeyCode::Esc if self.helps => self.help(false, lines)?,
                    KeyCode::Char('q' | 'Q') | KeyCode::Esc => return Ok(true),
                    KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                        return Ok(true);
                    }
                    _ => {}
                },
                Event::Resize(..) => self.draw(lines)?,
                _ => {}
            }
        }
        Ok(true)
    }
}

impl Screen {
    fn help(&mut self, helps: bool, lines: Lines) -> io::Result<()> {
        self.helps = helps;
        self.draw(lines)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // The terminal may be gone.
        let _ = execute!(self.out, LeaveAlternateScreen, cursor::Show);
        let _ = terminal::disable_raw_mode();
    }
}
